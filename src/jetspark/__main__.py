"""``python -m jetspark``: the ``jetspark`` command, for environments whose scripts are not on ``PATH``."""

from jetspark_command import run

if __name__ == "__main__":
    run()
