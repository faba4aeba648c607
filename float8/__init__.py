"""Low-precision recipes: how operands are quantised, which modules use which recipe, and emulation on any machine."""
