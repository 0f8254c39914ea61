"""Small pictures of the images that shown samples have, and how a prompt with images is printed."""
