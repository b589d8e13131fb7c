"""The command line, one file a verb. Heavy imports happen inside the commands."""
