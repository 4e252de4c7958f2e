"""gpupipe: torchvision's training pixels, faster, on the GPU or the CPU."""
