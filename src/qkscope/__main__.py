"""`python -m qkscope`."""

from qkscope.cli.main import main

raise SystemExit(main())
