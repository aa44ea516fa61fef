"""The argument parser that every verb begins with."""

import argparse


def verb_parser(verb: str, description: str) -> argparse.ArgumentParser:
    """A parser for `cuformers <verb>` that knows the options of every verb.

    cli/main.py acts on these before the verb is imported and takes them out of the arguments; here they are for
    the help text.
    """
    parser = argparse.ArgumentParser(prog=f"cuformers {verb}", description=description, allow_abbrev=False)
    common = parser.add_argument_group("options of every verb")
    common.add_argument("--gpus", metavar="LIST", help='GPUs to use, numbered as in nvidia-smi: "2,0"; "" for none')
    common.add_argument("--traceback", action="store_true", help="show where in the program an error was found")
    return parser
