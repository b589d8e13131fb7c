"""What lies on disk: headers, names, formats. Loads no weights."""
