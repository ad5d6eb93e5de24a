"""One command to a file. Each has `main(arguments)`, which returns the exit code; `cli` imports the
file of the command that was asked for, and no other.
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
