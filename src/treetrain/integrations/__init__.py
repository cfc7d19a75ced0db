"""treetrain inside other frameworks, one small file each; each is imported by the framework that it is for."""
