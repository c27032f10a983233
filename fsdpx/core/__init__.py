"""The core: what every training step needs. It knows no extension (`fsdpx.ext`, `data`, `models`, `plan`, ...)."""
