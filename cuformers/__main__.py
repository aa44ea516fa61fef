"""`python -m cuformers` is the command `cuformers`."""

from cuformers.cli.main import run

if __name__ == "__main__":
    run()
