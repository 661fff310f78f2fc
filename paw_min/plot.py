def draw(folders): pass
