"""Tools of the controller that nothing on a box needs."""
