"""What a converted graph must satisfy, whichever quantizer made it."""
