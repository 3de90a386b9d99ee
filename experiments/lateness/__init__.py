"""What late rows and late dense weights cost: streams, cells, rates of their own, delays."""
