"""How a draft leaves: the model card and the push to the Hub."""
