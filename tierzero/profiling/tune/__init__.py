"""The settings that make a configuration's steps shorter on this machine, found by short runs of it."""
