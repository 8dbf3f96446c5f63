"""Train a GPT over a ring of ranks: the script of `ringattn.train.commands.run`."""

from ringattn.train.commands.run import main

if __name__ == "__main__":
    main()
