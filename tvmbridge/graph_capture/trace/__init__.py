"""What a trace sees: stand-ins, functions replaced, operators taken apart or kept whole."""
