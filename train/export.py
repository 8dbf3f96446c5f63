"""Export a trained model: the script of `ringattn.train.commands.export`."""

from ringattn.train.commands.export import main

if __name__ == "__main__":
    main()
