"""The report's sections of single samples: recorded tokens, evaluated answers, their images."""
