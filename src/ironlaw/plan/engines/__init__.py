"""Training frameworks: the costs that each adds to the arithmetic, with one TOML file of constants each."""
