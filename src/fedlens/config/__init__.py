"""A TOML recipe and key=value overrides become checked constructor calls."""
