"""``gradwire`` and ``python -m gradwire``, as ``torchrun -m gradwire advise`` needs it."""

import sys


def main() -> int:
    """Runs the command line; returns the exit code, also of an interrupt while it is still being imported."""
    try:
        from gradwire import cli

        return cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
