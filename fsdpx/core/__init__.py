"""The core: the code that every training step needs. It imports no extension (`fsdpx.ext`, `data`, `models`, ...)."""
