"""The paper, reproduced: pieces, the claims that they answer, and one page about both."""
