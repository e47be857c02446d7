"""Ways of training. A method is an objective and, where needed, transforms over specs: other leaf types in the place of
plain weights. No loop and no model knows which one is at work.
"""
