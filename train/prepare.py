"""Tokenise a text before training: the script of `ringattn.train.commands.prepare`."""

from ringattn.train.commands.prepare import main

if __name__ == "__main__":
    main()
