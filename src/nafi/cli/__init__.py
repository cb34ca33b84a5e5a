"""The command line: parse, call, print; no logic.

Hides: typer and rich. Promises: exit code 0 only on success; an error that the user can fix is one
or two lines on standard error, without a traceback, with exit code 2; help never waits for torch.
"""

from nafi.cli import demo, experiments, flower, fuse, head, inspect, methods
from nafi.cli.app import main

__all__ = ["demo", "experiments", "flower", "fuse", "head", "inspect", "main", "methods"]
