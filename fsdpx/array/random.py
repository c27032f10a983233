"""TEMP"""
import hashlib
from dataclasses import dataclass, replace
import numpy as np
def _raw(seed,name,start,stop):
    key=int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(),digest_size=16).digest(),"little")
    b=np.random.Philox(key=key,counter=start//4)
    return b.random_raw(stop-start+start%4)[start%4:]
def uniform(seed,name,start,stop): return (_raw(seed,name,start,stop)>>np.uint64(11))*2.0**-53
def normal(seed,name,start,stop):
    u=uniform(seed,name,2*start,2*stop)
    return np.sqrt(-2*np.log(1-u[0::2]))*np.cos(2*np.pi*u[1::2])
def permutation(seed,name,n): return np.random.Generator(np.random.Philox(key=abs(hash((seed,name))))).permutation(n)
@dataclass(frozen=True)
class Random:
    seed:int; path:str=""; step:int=0; row:int=0
    def at(self,name): return replace(self,path=self.path+"."+name)
    def uniform(self,xp,shape):
        n=int(np.prod(shape[1:])); return uniform(self.seed,f"{self.path}/{self.step}",self.row*n,(self.row+shape[0])*n).reshape(shape)
