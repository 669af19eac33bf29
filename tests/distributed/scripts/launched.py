"""A script that starts its own ranks: `launched.py RANKS PROGRAM ARGUMENTS`."""

import json
import sys

from main import main

import pipe

if __name__ == "__main__":
    print(json.dumps(pipe.launch(main, int(sys.argv[1]), sys.argv[2:])))
