"""Reading of untrusted safetensors files."""
