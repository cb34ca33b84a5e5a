"""Tables, figures and pages: results in, files out; nothing here computes a result."""
