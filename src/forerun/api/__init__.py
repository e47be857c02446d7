"""The public Python API. `forerun/__init__.py` lists its names; the command line uses the same functions."""
