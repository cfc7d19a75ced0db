"""Tree attention: the reference, the CPU rectangles, FlexAttention, and the choice between them."""
