"""The dense weights: how ranks bring them up to date in each mode."""
