import torch
def mean_weight_gap(a,b):
    out=[]
    for (n,p),(m,q) in zip(a.named_parameters(),b.named_parameters()):
        if p.ndim<2: continue
        p,q=p.detach().double(),q.detach().double()
        out.append(((p-q).norm()/(0.5*(p.norm()+q.norm()))).item())
    return sum(out)/len(out)
