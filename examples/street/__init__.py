"""The bundled sample: a fixed street camera from night to morning, and a small detector trained on it."""
