"""Generate text with a trained model: the script of `ringattn.train.commands.generate`."""

from ringattn.train.commands.generate import main

if __name__ == "__main__":
    main()
