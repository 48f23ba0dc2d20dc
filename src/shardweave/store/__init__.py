"""How files hold sharded state: where each stored tensor's bytes lie, for every format alike."""
