"""What a run is: its config, from a YAML file and the command line, checked in every key."""
