"""How the embedded model "storyteller" is made; see training/README.md."""
