"""What runs at each call, and in each trace of a call: arguments, random draws, views, modes."""
