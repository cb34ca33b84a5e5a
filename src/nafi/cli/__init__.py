"""The command line: parse, call, print; no logic.

Hides: typer and rich. Promises: exit code 0 only on success; what a user can mend is told in a
line or two on standard error, without a traceback, with exit code 2.
"""

from nafi.cli import demo, experiments, flower, fuse, inspect
from nafi.cli.app import main

__all__ = ["demo", "experiments", "flower", "fuse", "inspect", "main"]
