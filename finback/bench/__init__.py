"""Speed as a ratio: each figure beside a physical limit or a named alternative of the same run."""
