"""Training frameworks: what each adds to the arithmetic, one TOML file of constants each."""
