"""GGUF files for llama.cpp and Ollama: metadata, vocabulary, tensor names and quantized blocks."""
