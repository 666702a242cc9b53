"""These tests want torch and JAX (the extra `interop`): without them nothing is collected here.

pytest calls that an error when it is asked for this folder alone, as `make interop` does.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("jax") else ["test_*.py"]
