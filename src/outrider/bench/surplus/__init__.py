"""How much hidden states know about tokens beyond the next one."""
