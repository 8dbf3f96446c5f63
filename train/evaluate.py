"""Evaluate a trained model: the script of `ringattn.train.commands.evaluate`."""

from ringattn.train.commands.evaluate import main

if __name__ == "__main__":
    main()
