"""How frameworks lay out state: each framework's rules, stated once."""
