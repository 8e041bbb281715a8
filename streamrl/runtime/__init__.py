"""How the roles of a run are started, watched and ended."""
