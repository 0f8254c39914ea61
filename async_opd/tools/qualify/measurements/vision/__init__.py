"""The measurements of vision models: ``images`` trains one, ``engines`` has ``gemma`` score."""
