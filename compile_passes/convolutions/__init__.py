"""The short convolution in front of a layer, and its history's update, exchanged for the library's operators."""
