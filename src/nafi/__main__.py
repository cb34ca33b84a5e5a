"""`python -m nafi`: the command line, for whoever has no `nafi` on the path."""

from nafi.cli import main

main()
