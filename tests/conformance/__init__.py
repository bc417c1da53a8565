"""Is every public class of Keras, in a distributed run, what it is on one device?"""
